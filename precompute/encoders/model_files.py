"""Files and identity of a model: a hub id, a folder, or "shipped:NAME"."""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from ...datasets.disk.hashing import read_json, sha256_file, sha256_of
from ...datasets.disk.weight_files import WeightFilesError, weight_names
from ...datasets.disk.weight_files import weight_files as chosen_files
from ...datasets.format.schema import EncoderIdentity
from ...datasets.remote.failures import one_line
from ...errors import DamageError, EncoderError
from ..config import EncoderSection, PrecomputeRecipe

if TYPE_CHECKING:  # torch takes seconds to import
    import torch

LOG = logging.getLogger(__name__)
SHIPPED = "shipped:"
CONFIG = "config.json"
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
TAESD_FILE = re.compile(r"tae.*_(?:en|de)coder\.(?:safetensors|pth)")
MAX_JSON_BYTES = 1 << 26  # of a tokenizer.json; the largest published ones have 35 MB
TOKENIZER_CLASSES = {None, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend"} | {
    f"{family}Tokenizer{fast}" for family in ("T5", "Gemma", "CLIP", "GPT2", "Llama", "Qwen2") for fast in ("", "Fast")
}


@contextlib.contextmanager
def nothing_fetched() -> Iterator[None]:
    """Find models on this machine alone, in folders and in the hub's cache: a store or run of others names them."""
    token = _FETCHES.set(False)
    try:
        yield
    finally:
        _FETCHES.reset(token)


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
            raise EncoderError(
                f"{what} '{model}': half of a TAESD, in its publisher's layout. Use the hub id, or a folder, of "
                "both halves as diffusers saves them: madebyollin/taesd, taesdxl, taesd3 or taef1."
            )
        if folder.is_file() or (folder.suffix in SINGLE_FILES and not folder.is_dir()):
            raise EncoderError(
                f"{what} '{model}': a single file, expected a folder with config.json. Load it with the library that "
                "made it (for a VAE: diffusers.AutoencoderKL.from_single_file), and save it with save_pretrained."
            )
        folder = model_folder(folder, subfolder)
        if not folder.is_dir():
            hub = "" if set(model) & set("./~:\\") else f", and on the hub a name has its owner, such as OWNER/{model}"
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
                f"{what} '{model}': it is not on this machine, and what only a store or run names is never fetched. "
                f"Fetch it with 'hf download {model}'."
            ) from error
        how = f" with --set {what}=PATH" if "." in what else ""
        raise EncoderError(
            f"{what} '{model}': not a local folder, and not available from the hub ({one_line(error)}). "
            f"Check the name, log in with 'hf auth login', or pass a folder{how}."
        ) from error
    LOG.info("%s '%s': commit %s of the hub, in '%s'", what, model, fetched.name, fetched / subfolder)
    return fetched / subfolder, fetched.name


def model_folder(folder: Path, subfolder: str) -> Path:
    """Folder of a model: the subfolder if there is one; else the folder itself if it is a model.

    So a recipe that names a subfolder of a pipeline also takes the folder of the encoder alone.
    """
    inside = folder / subfolder
    is_alone = not inside.is_dir() and (folder / CONFIG).is_file()
    return folder if is_alone else inside


def revision_notes(recipe: PrecomputeRecipe) -> list[str]:
    """What to say of revisions that have no effect, because the model is a local folder."""
    encoders: dict[str, EncoderSection] = {"vae": recipe.vae}
    encoders |= {f"text.{name}".rstrip("."): section for name, section in recipe.text.items()}
    encoders |= {f"features.{name}": section for name, section in recipe.features.items()}
    return [
        f"recipe: {name}.revision has no effect: it needs a model of the hub, and '{section.model}' is a local folder"
        for name, section in encoders.items()
        if section.revision and local_folder(section.model)
    ]


def local_folder(model: str) -> Path | None:
    """Folder of a local model, or None for a hub id."""
    if model.startswith(SHIPPED):
        name = model.removeprefix(SHIPPED)
        folder = Path(__file__).parents[1] / "demo_encoders" / name
        if not name.isidentifier() or not folder.is_dir():
            raise EncoderError(f"'{model}': no such encoder ships with leandit. Available: shipped:vae, shipped:t5.")
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
        raise EncoderError(f"{what} '{folder}': there is no '{name}'. Expected a folder saved by save_pretrained.")
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
                f"{what} '{path}': it asks for the tokenizer {str(name)[:80]!r} or for code of its own, expected that "
                "of a T5, CLIP, Gemma, GPT-2, Llama, Mistral or Qwen. Use a folder with the model's own tokenizer."
            )


def _read_object(path: Path, *, what: str) -> dict[str, Any]:
    try:
        found = read_json(path, max_bytes=MAX_JSON_BYTES)
    except (DamageError, OSError) as error:
        raise EncoderError(f"{what}: {error}") from error
    if not isinstance(found, dict):
        raise EncoderError(f"{what} '{path}': expected a JSON object.")
    return found


def weight_files(folder: Path, stem: str, *, what: str) -> list[Path]:
    """The safetensors that the library of a model loads, sorted; variants and other files beside them are left out.

    Args:
      stem: VAE_WEIGHTS, of a model of diffusers, or TEXT_WEIGHTS, of one of transformers.
    Raises: EncoderError: there are none, they are damaged, or a tensor is in two of them.
    """
    try:
        files = chosen_files(folder, stem, library="diffusers" if stem == VAE_WEIGHTS else "transformers")
    except WeightFilesError as error:
        raise EncoderError(f"{what} '{folder}': {error}.") from error
    for path in files:
        check_header(path, what=what)
    names = weights_in(files)
    if len(names) > len(set(names)):
        twice = next(name for name in names if names.count(name) > 1)
        raise EncoderError(f"{what} '{folder}': '{twice}' is in two of its files. Fetch or save the model again.")
    return files


def read_weight(files: Sequence[Path], name: str) -> torch.Tensor | None:
    """A tensor of safetensors by its name, on the CPU; None: no file has it."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118
                return file.get_tensor(name)
    return None


def weights_in(files: Sequence[Path]) -> list[str]:
    """Names of the weights in safetensors.

    Raises: EncoderError: a file is damaged.
    """
    names = list[str]()
    try:
        for path in files:
            with safe_open(path, framework="numpy") as file:
                names += file.keys()
    except (SafetensorError, OSError) as error:
        raise EncoderError(f"'{files[0].parent}': cannot be loaded: {one_line(error)}. Fetch it again.") from error
    return names


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


class ModelFiles:
    """The files of a model that a recipe names; those of a hub id are downloaded when they are asked for.

    Args:
      section: of the recipe.
      what: its key of the model, for messages.
      stem: of the names of its weights.
      others: files beside the config that tell how the model is used.
    Attributes:
      folder: of the model.
      revision: commit, if the model came from the hub.
      name: the model in the recipe, with its subfolder if the model is in it.
      where: key and folder, for messages.
    Raises: EncoderError: as ``resolve_model``.
    """

    def __init__(self, section: EncoderSection, what: str, *others: str, stem: str = TEXT_WEIGHTS) -> None:
        self._section, self._what, self._names, self._stem = section, what, (CONFIG, *others), stem
        self.revision: str | None = None
        self.folder, self.revision = self._fetch(section.subfolder, self._names)
        self.name, self.where = model_name(section, self.folder), f"{what} '{self.folder}'"

    def _fetch(self, subfolder: str, names: Iterable[str]) -> tuple[Path, str | None]:
        revision = self.revision or self._section.revision
        return resolve_model(self._section.model, subfolder, revision, files=names, what=self._what)

    def read(self, name: str = CONFIG) -> dict[str, Any]:
        """Its config.json, or another of its JSON files; raises EncoderError."""
        return read_config(self.folder, what=self._what, name=name)

    @cached_property
    def weights(self) -> list[Path]:
        """Its safetensors, sorted.

        Raises: EncoderError: there are none, they are damaged, or have fewer tensors than the config.json layers.
        """
        folder, _ = self._fetch(self._section.subfolder, (*self._names, *weight_names(self._stem)))
        files = weight_files(folder, self._stem, what=self._what)
        check_depth(self.read(), files, what=self._what)
        return files

    def tokenizer_folder(self, subfolder: str) -> Path:
        """The folder of its tokenizer."""
        return self._fetch(subfolder, TOKENIZER_FILES)[0]

    def identity(
        self,
        class_name: str,
        dtype: str,
        library: str,
        *,
        config: Mapping[str, Any] | None = None,
        tokenizer_sha256: str | None = None,
        tokenizer_files_sha256: str | None = None,
    ) -> EncoderIdentity:
        """The identity of an encoder: all that changes its numbers.

        Args:
          dtype: that it computes in.
          library: of the class: "diffusers" or "transformers".
          config: None: that of its config.json.
        """
        return EncoderIdentity(
            model=self.name,
            revision=self.revision,
            class_name=class_name,
            config=lasting_config(dict(self.read() if config is None else config)),
            weights_sha256=hash_files(self.weights),
            tokenizer_sha256=tokenizer_sha256,
            dtype=dtype,
            libraries=library_majors("torch", library),
            tokenizer_files_sha256=tokenizer_files_sha256,
        )


def model_name(section: EncoderSection, folder: Path) -> str:
    """The model in the recipe, with its subfolder if the model is in it."""
    in_subfolder = section.subfolder and folder != local_folder(section.model)
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


def arithmetic(dtype: str, device: torch.device) -> str:
    """Dtype that an encoder computes in: the recipe's, but float32 on a CPU.

    On a CPU 16 bits are slower and less exact. The identity in the store records the dtype.
    """
    return "float32" if device.type == "cpu" else dtype
