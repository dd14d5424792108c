"""DeepEP V2's `ElasticBuffer` on the normal operations of `Buffer`: other rows, handles and sums, the same kernels."""
