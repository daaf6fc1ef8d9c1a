"""modded-nanogpt's `state_step000500.pt`: {step, code, model, optimizer(s)}; `code` is the script's text, never run.

Source: KellerJordan/modded-nanogpt, train_gpt.py.
"""

from workbench.checkpoints.format import Format

FORMAT = Format(name="modded-nanogpt", keys=("model", "code"), without="model_args", step="step", code="code")
