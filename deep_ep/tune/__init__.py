"""Settings of the normal kernels, chosen by measuring the exchange of a model on the ranks of a job.

`python -m deep_ep.tune`, under torchrun, measures; `remembered` finds what was chosen.
"""

from deep_ep.tune.choice import Experts, Tuned
from deep_ep.tune.memory import remembered
from deep_ep.tune.trials import Model

__all__ = ["Experts", "Model", "Tuned", "remembered"]
