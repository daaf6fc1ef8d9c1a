"""`LightningCallback`: a recorder inside a Lightning Trainer.

Trainer(callbacks=[workbench.LightningCallback("runs/mine", every=100)])

Lightning calls `on_before_optimizer_step` after the last backward pass of a step and before clipping, inside the optimiser's
closure. Under AMP, gradients are already unscaled.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from workbench.training.recorder.recorder import Recorder

Callback: Any = None
for package in ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks"):
    try:
        Callback = Callback or importlib.import_module(package).Callback
    except ModuleNotFoundError as error:
        if not package.startswith(str(error.name)):
            raise
if Callback is None:
    raise ImportError("a Lightning callback needs Lightning: pip install lightning", name="lightning")


class LightningCallback(Callback):
    """Callback with a `Recorder` of the LightningModule, or of its part `module`, from the Trainer's first step on.

    The loss is the mean of `training_step` over the batches of an optimiser step; `every` counts optimiser steps.
    """

    def __init__(
        self, folder: str | Path | None = None, every: int = 100, *, module: str = "", **settings: Any
    ) -> None:
        super().__init__()
        self.folder, self.every, self.module, self.settings = folder, every, module, settings
        self.recorder: Recorder | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        model = pl_module.get_submodule(self.module) if self.module else pl_module
        settings: dict[str, Any] = {"start": trainer.global_step or None} | self.settings
        self.recorder = Recorder(model, self.every, self.folder, **settings)
        self.losses, self.counted = list[Any](), self.recorder.count  # since the last optimiser step

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.recorder:
            scaler = getattr(getattr(trainer, "precision_plugin", None), "scaler", None)
            self.recorder.step(scaler=scaler, learning_rate=optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Add the loss of a recorded step, which Lightning divides by the number of accumulated batches."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.losses += [] if loss is None else [loss]
        if (recorder := self.recorder) and recorder.count > self.counted:  # with an optimiser step
            many, recorded = len(self.losses), recorder.open
            if many and recorded and recorded.step == recorder.count - 1:
                recorder.add_to_record("train_loss", sum(self.losses) * trainer.accumulate_grad_batches / many)
            self.losses, self.counted = [], recorder.count

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self.recorder:
            self.recorder.close()
            self.recorder = None
