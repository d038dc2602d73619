"""ddtree-compile: a static-pipeline compiler for DDTree speculative decoding."""

__version__ = "0.1.0"
