"""`RecorderCallback`: a recorder inside a `transformers` Trainer.

Trainer(model=model, args=..., train_dataset=..., callbacks=[workbench.RecorderCallback("runs/mine", every=100)])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from workbench.training.recorder.quantities import UNITS
from workbench.training.recorder.recorder import Recorder


class RecorderCallback(TrainerCallback):
    """Callback with a `Recorder` of the Trainer's model; a resumed training continues its recording.

    The Trainer calls no callback between the backward pass and clipping. If it clips (`max_grad_norm` > 0), gradient norms
    are measured after clipping and have the variant `clipped`. The loss, the learning rate and the norm before clipping are
    recorded at the Trainer's own logging steps; its loss is the mean over the steps since the last of them.
    """

    def __init__(self, folder: str | Path | None = None, every: int = 100, **settings: Any) -> None:
        self.folder, self.every, self.settings = folder, every, settings
        self.recorder: Recorder | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        settings = {"seed": args.seed, "start": state.global_step} | self.settings
        self.recorder = Recorder(model, self.every, self.folder, **settings)
        self.recorder.variant = "clipped" if args.max_grad_norm and args.max_grad_norm > 0 else None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if self.recorder:
            self.recorder.step(scaler=getattr(optimizer, "scaler", None))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Add the Trainer's logged numbers: of the step before `global_step`, and the loss of an evaluation after it."""
        if self.recorder and state.global_step:
            names = {"loss": "train_loss", "eval_loss": "validation_loss", "learning_rate": "learning_rate"}
            for name in names.keys() & (logs or {}).keys():
                axes = {"unit": UNITS.get("train_loss") if "loss" in name else None}
                step = state.global_step - (name != "eval_loss")
                self.recorder.note(names[name], logs[name], step=step, **axes)
            if "grad_norm" in (logs or {}) and self.recorder.variant:
                axes = {"part": "all", "unit": UNITS["gradient_norm"]}
                self.recorder.note("gradient_norm", logs["grad_norm"], step=state.global_step - 1, **axes)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.recorder:
            self.recorder.close()
            self.recorder = None
