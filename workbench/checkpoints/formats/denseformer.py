"""Files of DenseFormer's training code: {model, optimizer, scheduler, itr, ...}, tensors named as a Llama's.

Source: epfml/DenseFormer, optim/utils.py.
"""

from workbench.checkpoints.format import Format

FORMAT = Format(name="DenseFormer", keys=("model", "itr"), without="model_args", step="itr")
