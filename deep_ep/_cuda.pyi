"""The native module of the cuda backend: the same interface as `deep_ep._cpu`."""

from deep_ep._cpu import *  # noqa: F403
