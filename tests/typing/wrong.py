"""Uses that a type checker must reject: one error on every line that calls something."""

import torch

import workbench

workbench.mesure("x")
workbench.measure(1, 2, 3, 4, 5, 6, nope=1)
number: int = workbench.load("models-transformer-s0")
workbench.build(preset="tiny")
workbench.prompts.logit_lense()
workbench.observe(torch.nn.Linear(2, 2), torch.zeros(1, 8)).generate(max_tokens=5)
