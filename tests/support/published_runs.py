"""Published training runs with known hardware, batch and arithmetic, which the model of scaling is held to.

Figures are from the sources, arithmetic is counted from the architectures. Weights and their states are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from leandit.tools.plan.scaling import StepWork, step_time
from leandit.train.metrics.gpus import gpu_by_name

TERA = 1e12
XL2_FLOPS, VAE_FLOPS, DINO_FLOPS = 0.712 * TERA, 0.273 * TERA, 0.044 * TERA  # of an image of 256 px


@dataclass(frozen=True)
class PublishedRun:
    """A run, and what it reached.

    Args:
      name: as in docs/planning.md.
      rate: images a second and GPU.
      batch: of all GPUs.
      microbatch: images of each forward of a GPU; 0: all of them.
      network_gbit: a GPU; only that of torchtitan is published.
      mfu: published, of the smaller run of a pair, where only scaling is predicted.
      is_fitted: the constants are fitted to it.
    """

    name: str
    rate: float
    gpu: str
    gpus: int
    batch: int
    work: StepWork
    strategy: str = "ddp"
    microbatch: int = 0
    network_gbit: float = 400.0
    mfu: float | None = None
    is_fitted: bool = False

    @property
    def predicted(self) -> float:
        """Images a second and GPU by the model."""
        gpu = gpu_by_name(self.gpu)
        assert gpu is not None
        images = self.batch // self.gpus
        how = {"network_gbit": self.network_gbit, "mfu": self.mfu}
        time = step_time(self.work, gpu, self.strategy, self.gpus, images, self.microbatch or images, **how)
        return images / time.seconds


def work(
    flops: float,
    parameters: float,
    bytes_a_parameter: int = 20,
    precision: str = "fp16",
    launches: tuple[int, int] = (3359, 3001),
) -> StepWork:
    """The work of a model that is gathered in 16 bits; 20 bytes a parameter are AdamW with one average.

    Args:
      launches: operations that allocate, as traced; by default those of a DiT-XL.
    """
    weights = 4 * parameters
    return StepWork(flops, weights, weights, bytes_a_parameter * parameters, 2 * parameters, precision, launches)


DIT = work(XL2_FLOPS, 675e6)
RECOMPUTED = work(XL2_FLOPS * 4 / 3, 675e6, launches=(4339, 3981))
REPA = work(XL2_FLOPS + DINO_FLOPS, 675e6)
ONLINE = work(XL2_FLOPS + VAE_FLOPS, 675e6, precision="tf32")
RECOMPUTED_ONLINE = work(XL2_FLOPS * 4 / 3 + VAE_FLOPS, 675e6, precision="tf32", launches=(4339, 3981))
MASKED = work(0.39 * TERA, 730e6)
SD2_256, SD2_512 = (work(flops * TERA, 866e6, 16, launches=(3300, 2900)) for flops in (0.543, 2.413))
LLAMA = work(8192 * 57.9e9, 8.03e9, 16, "bf16")  # torchtitan's count: 6 a weight and token, and attention
WAN = work(37440 * 176e9, 14.3e9, 16, "bf16")
WAN_TFLOP = 37440 * 176e9 / TERA  # NVIDIA publishes TFLOP/s

RUNS = (
    PublishedRun("fast-DiT XL/2, 1 A100", 96.0, "A100-80", 1, 128, RECOMPUTED, is_fitted=True),
    PublishedRun("fast-DiT XL/2, 2 A100", 85.0, "A100-80", 2, 128, RECOMPUTED, is_fitted=True),
    PublishedRun("fast-DiT XL/2, 1 A100, TF32", 53.8, "A100-80", 1, 128, RECOMPUTED_ONLINE),
    PublishedRun("fast-DiT XL/2, 2 A100, TF32", 49.3, "A100-80", 2, 128, RECOMPUTED_ONLINE),
    PublishedRun("DiT-XL/2, 8 A100, TF32", 25.9, "A100-80", 8, 256, ONLINE),
    PublishedRun("MaskDiT-XL/2, 8 A100", 273.0, "A100-80", 8, 1024, MASKED, is_fitted=True),
    PublishedRun("REPA SiT-XL/2, 8 H100", 173.0, "H100", 8, 256, REPA, is_fitted=True),
    PublishedRun("LightningDiT-XL/1, 8 H800", 284.0, "H100", 8, 1024, DIT, is_fitted=True),
    *(
        PublishedRun(
            f"SD2 U-Net {side} px, {gpus} A100",
            rate / gpus,
            "A100-80",
            gpus,
            2048,
            unet,
            "fsdp, gradients",
            16,
            network_gbit=200.0,
            is_fitted=gpus == 8,
        )
        for side, unet, rates in (
            (256, SD2_256, (1100, 2180, 4080, 8530, 11600)),
            (512, SD2_512, (290, 585, 1195, 2340, 4590)),
        )
        for gpus, rate in zip((8, 16, 32, 64, 128), rates, strict=True)
    ),
    *(
        PublishedRun(f"Wan 2.1 14B, {gpus} H100", rate / WAN_TFLOP, "H100", gpus, gpus, WAN, "fsdp")
        for gpus, rate in ((8, 175.88), (64, 228.85))
    ),
    *(
        PublishedRun(f"Llama 3.1 8B{name}, {gpus} H100", rate / 8192, "H100", gpus, 2 * gpus, LLAMA, "fsdp", mfu=mfu)
        for name, mfu, rates in ((", eager", 0.33, (5762, 5605)), (", compiled", 0.39, (6667, 6514)))
        for gpus, rate in zip((8, 128), rates, strict=True)
    ),
)
