"""Recorder for any training loop: three lines of code, the same records and the same Training page.

recorder = workbench.Recorder(model, every=100, folder="runs/mine")   # any module ... loss.backward(); recorder.step(loss);
optimizer.step()                # before clipping ... recorder.close()
"""

from workbench.training.recorder.quantities import DEFAULT, NotRecorded, quantities
from workbench.training.recorder.recorder import Recorder

__all__ = ["DEFAULT", "NotRecorded", "Recorder", "quantities"]
