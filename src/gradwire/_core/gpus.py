"""Running on a machine with GPUs as if it had none."""

from __future__ import annotations

import os


def hide_gpus() -> None:
    """Hide the GPUs of this machine from this process and its children. Call this before torch uses
    a GPU.

    In a process that sees a GPU, a backward starts threads of torch for it, also a backward on the
    CPU. A child that is forked later cannot run a backward. So programs that fork workers hide the
    GPUs first, unless they measure or test them.

    >>> hide_gpus()
    >>> torch.cuda.device_count()
    0
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
