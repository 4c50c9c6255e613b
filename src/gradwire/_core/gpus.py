"""Running on a machine with GPUs as if it had none."""

from __future__ import annotations

import os


def hide_gpus() -> None:
    """Hide the GPUs of this machine from this process and its children. Call this before torch uses
    a GPU.

    If a process sees a GPU, its first backward makes torch start threads for the GPU, even if all
    tensors are on the CPU. A forked child does not have these threads, so a child that is forked
    after such a backward cannot run a backward. Programs that fork workers therefore hide the GPUs
    first, unless they measure or test GPUs.

    >>> hide_gpus()
    >>> torch.cuda.device_count()
    0
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
