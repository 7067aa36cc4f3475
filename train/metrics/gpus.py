"""Known GPUs: dense peak rates, memory and links, as published by the vendor.

Rates are without sparsity, at the boost clock, with accumulation in float32 for 16-bit inputs. For GeForce cards that
is half of the rate with 16-bit accumulation. A rate of 0: the GPU lacks that precision.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Args:
      name: in our tables.
      words: in lower case; the driver's name has them all.
      memory_gib: free memory of an idle GPU, in GiB.
      bf16, fp16, tf32, fp32: dense peak, in TFLOP/s.
      memory_gb_s: bandwidth of its memory, in GB/s.
      link_gb_s: to the other GPUs of its machine, in one direction, in GB/s: NVLink with a switch (SXM), else PCIe.
    """

    name: str
    words: tuple[str, ...]
    memory_gib: float
    bf16: float
    fp16: float
    tf32: float
    fp32: float
    memory_gb_s: float
    link_gb_s: float

    def peak_flops(self, precision: str) -> float:
        """Peak in FLOP/s of "bf16", "fp16", "tf32" or "fp32"; 0: unsupported."""
        return {"bf16": self.bf16, "fp16": self.fp16, "tf32": self.tf32, "fp32": self.fp32}[precision] * 1e12


# Data sheets of NVIDIA: B200 (HGX B200), H200, H100, A100, L40S, L4, A10, A40, T4, V100; white papers of Ada
# (appendix A), Ampere GA102 (appendix A) and Blackwell (appendix A). Longer names stand before those they contain.
GPUS = (
    Gpu("B200", ("b200",), 178.0, 2250.0, 2250.0, 1125.0, 75.0, 7700.0, 900.0),
    Gpu("H200", ("h200",), 139.8, 989.4, 989.4, 494.7, 66.9, 4800.0, 450.0),
    Gpu("H100-NVL", ("h100", "nvl"), 93.1, 835.5, 835.5, 417.5, 60.0, 3900.0, 64.0),
    Gpu("H100-PCIe", ("h100", "pcie"), 79.1, 756.0, 756.0, 378.0, 51.2, 2000.0, 64.0),
    Gpu("H100", ("h100",), 79.1, 989.4, 989.4, 494.7, 66.9, 3350.0, 450.0),
    Gpu("A100-40", ("a100", "40gb"), 39.4, 312.0, 312.0, 156.0, 19.5, 1555.0, 300.0),
    Gpu("A100-80", ("a100",), 79.1, 312.0, 312.0, 156.0, 19.5, 2039.0, 300.0),
    Gpu("L40S", ("l40s",), 44.4, 362.0, 362.0, 183.0, 91.6, 864.0, 32.0),
    Gpu("A40", ("a40",), 44.4, 149.7, 149.7, 74.8, 37.4, 696.0, 32.0),
    Gpu("A10G", ("a10g",), 22.0, 70.0, 70.0, 35.0, 35.0, 600.0, 32.0),
    Gpu("A10", ("a10",), 22.0, 125.0, 125.0, 62.5, 31.2, 600.0, 32.0),
    Gpu("L4", ("l4",), 22.0, 121.0, 121.0, 60.0, 30.3, 300.0, 32.0),
    Gpu("RTX-5090", ("rtx", "5090"), 31.3, 209.5, 209.5, 104.8, 104.8, 1792.0, 64.0),
    Gpu("RTX-4090", ("rtx", "4090"), 23.5, 165.2, 165.2, 82.6, 82.6, 1008.0, 32.0),
    Gpu("RTX-3090", ("rtx", "3090"), 23.5, 71.0, 71.0, 35.6, 35.6, 936.0, 32.0),
    Gpu("V100-32", ("v100", "32gb"), 31.7, 0.0, 125.0, 0.0, 15.7, 900.0, 150.0),
    Gpu("V100", ("v100",), 15.7, 0.0, 125.0, 0.0, 15.7, 900.0, 150.0),
    Gpu("T4", ("t4",), 14.6, 0.0, 65.0, 0.0, 8.1, 300.0, 16.0),
)


# Words that make a name another GPU, or a slice of one, with other rates.
OTHERS = {"ti", "super", "laptop", "mobile", "max-q", "d", "mig"}


def gpu_by_name(name: str) -> Gpu | None:
    """Find a GPU by its name in the table or by ``torch.cuda.get_device_name``; None if unknown.

    An "RTX 4090 Laptop GPU" is not an RTX-4090, and a slice of an H200 (MIG) is not an H200.
    """
    lower = name.lower()
    for gpu in GPUS:
        if lower == gpu.name.lower():
            return gpu
    if OTHERS & set(lower.split()):
        return None
    pieces = lower.replace("-", " ").split()

    def has(word: str) -> bool:  # whole words, so that an A100 is not an A10; "80gb" may be a suffix
        return any(piece == word or (word.endswith("gb") and piece.endswith(word)) for piece in pieces)

    return next((gpu for gpu in GPUS if all(map(has, gpu.words))), None)
