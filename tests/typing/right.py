"""Uses of the public interface that a type checker accepts."""

import pandas as pd
import torch

import workbench

model = workbench.load("models-transformer-s0", dtype=torch.float32)
logits, cache = model.run_with_cache("def main():", names_filter="blocks.0.attn.hook_v")
layers: int = model.config.n_layers
frame: pd.DataFrame = workbench.measure(model, ["importance_entropy"], torch.zeros(1, 8, dtype=torch.long))
observed = workbench.observe(torch.nn.Linear(2, 2), torch.zeros(1, 8, dtype=torch.long))
same: workbench.Run = workbench.Run.open("runs/mine")
lens = workbench.prompts.logit_lens(model, "def main():", top=5)
built = workbench.build("resformer", "tiny", seed=1, lambda_v1=0.5)
output = model(input_ids=torch.zeros(1, 8, dtype=torch.long), labels=torch.zeros(1, 8, dtype=torch.long))
text = model.generate("def main():", 5, do_sample=True, temperature=0.8, top_k=50, top_p=0.9)
folder = model.save_pretrained("copy")
