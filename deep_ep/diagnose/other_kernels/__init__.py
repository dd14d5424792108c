"""Counters of waiting that kernels of others fill: attached from outside, judged by waiting alone."""
