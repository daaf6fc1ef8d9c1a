"""Lightning's `epoch=1-step=500.ckpt`: {state_dict: {"model...."}, global_step, hyper_parameters, ...}, any model's tensors.

Source: Lightning-AI/pytorch-lightning, trainer/connectors/checkpoint_connector.py.
"""

from workbench.checkpoints.format import Format

KEYS = ("state_dict", "global_step")
FORMAT = Format(name="Lightning", keys=KEYS, weights="state_dict", step="global_step", config="hyper_parameters")
