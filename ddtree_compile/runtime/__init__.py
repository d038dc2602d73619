"""What runs a plan: checkpoints and weights, executors, the engine. Imports neither the compiler nor Triton."""
