"""Block formats of quantised weights: sizes, layouts and the numpy decoders that serve as their
specification.
"""
