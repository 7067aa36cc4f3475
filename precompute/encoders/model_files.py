"""Files and identity of a model: a hub id, a folder, or "shipped:NAME"."""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, StrictDataclassError
from safetensors import SafetensorError, safe_open

from ...datasets.disk.hashing import read_json, sha256_file, sha256_of
from ...datasets.errors import DamageError, EncoderError
from ...datasets.format.schema import EncoderIdentity
from ..config import FeatureSection, TextSection, VaeSection

if TYPE_CHECKING:  # torch takes seconds to import
    import torch

LOG = logging.getLogger(__name__)
SHIPPED = "shipped:"
CONFIG = "config.json"
# Errors that the libraries raise for a malformed config or file.
LOADING_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    NotImplementedError,
    RuntimeError,
    LookupError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)
VAE_WEIGHTS, TEXT_WEIGHTS = "diffusion_pytorch_model", "model"
# Exact names: on the hub "*" matches across folders and would download the other models of a pipeline.
TOKENIZER_FILES = (
    CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "spiece.model",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
SINGLE_FILES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
_FETCHES: ContextVar[bool] = ContextVar("fetches", default=True)
TAESD_FILE = re.compile(r"(tae.*_)(?:en|de)(coder\.(?:safetensors|pth))")
MAX_ERROR_CHARS = 200  # of a library's message; some list every weight
MAX_JSON_BYTES = 1 << 26  # of a tokenizer.json; the largest published ones have 35 MB
TOKENIZER_CLASSES = (
    None,
    "T5Tokenizer",
    "T5TokenizerFast",
    "PreTrainedTokenizerFast",
    "PreTrainedTokenizer",
    "TokenizersBackend",
    "GemmaTokenizer",
    "GemmaTokenizerFast",
    "CLIPTokenizer",
    "CLIPTokenizerFast",
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "Qwen2Tokenizer",
    "Qwen2TokenizerFast",
)


@contextlib.contextmanager
def nothing_fetched() -> Iterator[None]:
    """Find models on this machine alone, in folders and in the hub's cache: a store or run of others names them."""
    token = _FETCHES.set(False)
    try:
        yield
    finally:
        _FETCHES.reset(token)


def weight_names(stem: str) -> tuple[str, ...]:
    """File patterns of a model's safetensors on the hub, whole or sharded."""
    return f"{stem}.safetensors", f"{stem}.safetensors.index.json", f"{stem}-?????-of-?????.safetensors"


def resolve_model(
    model: str, subfolder: str, revision: str, *, files: Iterable[str], what: str
) -> tuple[Path, str | None]:
    """Find the folder of a model; files of a hub id are downloaded, except within ``nothing_fetched``.

    Args:
      files: names to download, "?" for any character.
    Returns: the folder, and the commit if it came from the hub.
    Raises: EncoderError: no such folder, and the hub does not have it, or it is not on this machine.
    """
    folder = local_folder(model)
    if folder is not None:
        if TAESD_FILE.fullmatch(folder.name) and not folder.is_dir():
            raise EncoderError(f"{what} '{model}': {taesd_conversion(folder)}")
        if folder.is_file() or (folder.suffix in SINGLE_FILES and not folder.is_dir()):
            raise EncoderError(
                f"{what} '{model}': a single file, needed a folder with config.json. Load it with the library that "
                "made it, and save it with save_pretrained."
            )
        folder = model_folder(folder, subfolder)
        if not folder.is_dir():
            hub = "" if set(model) & set("./~:\\") else f", and on the hub a name has its owner, as OWNER/{model}"
            raise EncoderError(f"{what} '{model}': there is no such folder as '{folder}'{hub}. Check the recipe.")
        return folder, None
    prefix = f"{subfolder.strip('/')}/" if subfolder else ""
    patterns = [prefix + name for name in files]
    is_local = not _FETCHES.get()
    try:
        fetched = Path(
            snapshot_download(model, revision=revision or None, allow_patterns=patterns, local_files_only=is_local)
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        if is_local:
            raise EncoderError(
                f"{what} '{model}': it is not on this machine, and nothing is fetched because a store or run names it. "
                f"Fetch it with 'hf download {model}'."
            ) from error
        how = f" with --set {what}=PATH" if "." in what else ""
        raise EncoderError(
            f"{what} '{model}': not a folder here, and the hub does not give it ({shortened(error)}). "
            f"Check the name, log in with 'hf auth login', or give a folder{how}."
        ) from error
    LOG.info("%s '%s': commit %s of the hub, in '%s'", what, model, fetched.name, fetched / subfolder)
    return fetched / subfolder, fetched.name


def is_single_file(model: str) -> bool:
    """Whether a model is one file of safetensors, and no folder or hub id."""
    path = local_folder(model)
    return path is not None and path.suffix == ".safetensors" and not path.is_dir()


def taesd_conversion(file: Path) -> str:
    """For an error: how the encoder and the decoder of a TAESD, as published and in ComfyUI, become a folder.

    The published decoder counts its clamp as layer 0, which diffusers does not.
    """
    encoder, decoder = (str(file.with_name(TAESD_FILE.sub(rf"\1{part}\2", file.name))) for part in ("en", "de"))
    load = (
        "safetensors.torch.load_file(path)" if file.suffix == ".safetensors" else "torch.load(path, weights_only=True)"
    )
    folder = str(file.with_name(file.name.split("_")[0]))
    lines = [
        "import re, torch, safetensors.torch; from diffusers import AutoencoderTiny",
        f"load = lambda path: {load}",
        f'w = {{"encoder.layers." + k: v for k, v in load({encoder!r}).items()}}',
        f'w |= {{"decoder.layers." + re.sub(r"^\\d+", lambda m: str(int(m[0]) - 1), k): v '
        f"for k, v in load({decoder!r}).items()}}",
        'model = AutoencoderTiny(latent_channels=w["decoder.layers.0.weight"].shape[1]); model.load_state_dict(w)',
        f"model.save_pretrained({folder!r})",
        f"# Then give the folder {folder!r} instead of the file.",
    ]
    return "half of a TAESD, with the names of its publisher. Convert both halves with Python:\n  " + "\n  ".join(lines)


def model_folder(folder: Path, subfolder: str) -> Path:
    """Folder of the model: the folder itself if it is the model, else its subfolder."""
    return folder if (folder / CONFIG).is_file() else folder / subfolder


def local_folder(model: str) -> Path | None:
    """Folder of a local model, or None for a hub id."""
    if model.startswith(SHIPPED):
        name = model.removeprefix(SHIPPED)
        folder = Path(__file__).parents[1] / "demo_encoders" / name
        if not name.isidentifier() or not folder.is_dir():
            raise EncoderError(f"'{model}': no such encoder ships with leandit; there are shipped:vae and shipped:t5.")
        return folder
    path = Path(model).expanduser()
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        return path
    return None


def read_config(folder: Path, *, what: str, name: str = CONFIG) -> dict[str, Any]:
    """Read a model's config.json, or another JSON file of it.

    Raises: EncoderError: missing, or not a JSON object.
    """
    path = folder / name
    if not path.is_file():
        raise EncoderError(f"{what} '{folder}': there is no '{name}'. Needed a folder saved by save_pretrained.")
    return _read_object(path, what=what)


def check_tokenizer_files(folder: Path, *, what: str) -> None:
    """Raise if a tokenizer needs custom code or its files are malformed, before a library opens them.

    Raises: EncoderError.
    """
    for path in sorted(folder.glob("*.json")):
        if path.name.endswith(".index.json") or not ("token" in path.name or path.name in TOKENIZER_FILES):
            continue  # not of the tokenizer
        said = _read_object(path, what=what)
        name = said.get("tokenizer_class")
        if path.name == "tokenizer_config.json" and ("auto_map" in said or name not in TOKENIZER_CLASSES):
            raise EncoderError(
                f"{what} '{path}': it asks for the tokenizer {str(name)[:80]!r} or for code of its own, needed that "
                "of a T5, CLIP, Gemma, GPT-2, Llama, Mistral or Qwen. Give a folder with the model's own tokenizer."
            )


def _read_object(path: Path, *, what: str) -> dict[str, Any]:
    try:
        found = read_json(path, max_bytes=MAX_JSON_BYTES)
    except (DamageError, OSError) as error:
        raise EncoderError(f"{what}: {error}") from error
    if not isinstance(found, dict):
        raise EncoderError(f"{what} '{path}': needed a JSON object.")
    return found


def weight_files(folder: Path, stem: str, *, what: str) -> list[Path]:
    """Safetensors of a model, sorted.

    Raises: EncoderError: there are none.
    """
    files = sorted(path for path in folder.glob(f"{stem}*.safetensors") if ".fp16." not in path.name)
    if not files:
        others = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise EncoderError(
            f"{what} '{folder}': there are no weights '{stem}*.safetensors' (found: {others}). "
            "Only safetensors are read; convert other weights with save_pretrained(..., safe_serialization=True)."
        )
    index = folder / f"{stem}.safetensors.index.json"
    if index.is_file():  # the libraries load whatever it names
        named = _read_object(index, what=what).get("weight_map")
        names = set(map(str, named.values())) if isinstance(named, dict) else {""}
        if strange := sorted(names - {path.name for path in files}):
            raise EncoderError(
                f"{what} '{index}': it names '{strange[0][:80]}', needed only '{stem}*.safetensors' beside it. "
                "Fetch or save the model again."
            )
    for path in files:
        check_header(path, what=what)
    return files


def weights_in(files: Sequence[Path]) -> list[str]:
    """Names of the weights in safetensors.

    Raises: EncoderError: a file is damaged.
    """
    try:
        return [name for path in files for name in _names_in(path)]
    except (SafetensorError, OSError) as error:
        raise EncoderError(f"'{files[0].parent}': cannot be loaded: {shortened(error)}. Fetch it again.") from error


def _names_in(path: Path) -> list[str]:
    with safe_open(path, framework="numpy") as file:
        return list(file.keys())


def check_depth(config: Any, files: Sequence[Path], *, what: str) -> None:
    """Raise if a config.json names more layers than its weights have tensors: they would be made before any is missed.

    Raises: EncoderError.
    """
    num_tensors = len(weights_in(files))
    for key, value in _items_of(config):
        counts_layers = key == "depth" or ("layers" in key and not key.startswith("max_"))  # a bound makes none
        if counts_layers and isinstance(value, int) and value > num_tensors:
            raise EncoderError(
                f"{what} '{files[0].parent}': its config.json has {key} {str(value)[:80]}, its weights have "
                f"{num_tensors} tensors. Fetch or save the model again."
            )


def _items_of(config: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values of a config and of those within."""
    for key, value in config.items() if isinstance(config, dict) else ():
        yield key, value
        yield from _items_of(value)


def check_header(path: Path, *, what: str) -> None:
    """Raise if a safetensors header is longer than its file, before it is allocated."""
    size = path.stat().st_size if path.is_file() else 0
    with open(path, "rb") if size else io.BytesIO() as file:
        length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_JSON_BYTES):
        raise EncoderError(f"{what} '{path}': cannot be loaded: {size} bytes, header of {length}. Fetch it again.")


def shortened(error: BaseException) -> str:
    """The beginning of a library's message, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 3] + "..."


def model_name(section: VaeSection | TextSection | FeatureSection, folder: Path) -> str:
    """The model in the recipe, with its subfolder if the model is in it."""
    in_subfolder = section.subfolder and not is_single_file(section.model) and folder != local_folder(section.model)
    return f"{section.model}/{section.subfolder}" if in_subfolder else section.model


def tokenizer_files(folder: Path) -> list[Path]:
    """The existing files that a tokenizer is read from."""
    return [path for name in TOKENIZER_FILES if (path := folder / name).is_file()]


def hash_files(files: list[Path]) -> str:
    """SHA-256 over the names and contents of files."""
    return sha256_of([[path.name, sha256_file(path)] for path in files])


def lasting_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config without keys that do not affect the numbers."""
    volatile = ("_diffusers_version", "transformers_version", "_name_or_path", "architectures", "torch_dtype", "dtype")
    return {key: value for key, value in sorted(config.items()) if key not in volatile}


def library_majors(*packages: str) -> dict[str, str]:
    """Major versions of libraries; with the minor version before 1.0."""
    majors = {}
    for name in packages:
        major, minor = metadata.version(name).split(".")[:2]
        majors[name] = f"0.{minor}" if major == "0" else major
    return majors


def identity(
    section: VaeSection | TextSection | FeatureSection,
    folder: Path,
    revision: str | None,
    class_name: str,
    config: Mapping[str, Any],
    weights_sha256: str,
    dtype: str,
    library: str,
    *,
    tokenizer_sha256: str | None = None,
    tokenizer_files_sha256: str | None = None,
) -> EncoderIdentity:
    """The identity of an encoder: all that changes its numbers.

    Args:
      config: of its config.json.
      dtype: that it computes in.
      library: of the class: "diffusers" or "transformers".
    """
    return EncoderIdentity(
        model=model_name(section, folder),
        revision=revision,
        class_name=class_name,
        config=lasting_config(dict(config)),
        weights_sha256=weights_sha256,
        tokenizer_sha256=tokenizer_sha256,
        dtype=dtype,
        libraries=library_majors("torch", library),
        tokenizer_files_sha256=tokenizer_files_sha256,
    )


def arithmetic(dtype: str, device: torch.device) -> str:
    """Dtype that an encoder computes in: the recipe's, but float32 on a CPU.

    On a CPU 16 bits are slower and less exact. The identity in the store records the dtype.
    """
    return "float32" if device.type == "cpu" else dtype
