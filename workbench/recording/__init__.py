"""Recording somebody's own training loop: three lines, the same records, the same Training page.

recorder = workbench.Recorder(model, every=100, folder="runs/mine")   # any module
...
loss.backward(); recorder.step(loss); optimizer.step()                # before clipping
...
recorder.close()
"""

from workbench.recording.quantities import DEFAULT, quantities
from workbench.recording.recorder import NotRecorded, Recorder

__all__ = ["DEFAULT", "NotRecorded", "Recorder", "quantities"]
