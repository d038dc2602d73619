"""The errors a user can cause or meet. Each is one line: what, where (spec key, file, op scope), what to do.

An error owns its exit code; the only handler is in `cli.py`.
"""


class DdtreeError(Exception):
    """Base of every error this package raises on purpose. `exit_code` is the process's exit status."""

    exit_code = 3


class SpecError(DdtreeError):
    """The spec, a flag or a model config asks for something that is wrong or that we lack."""

    exit_code = 2


class PromptError(DdtreeError):
    """A prompt, a chat template or sampling parameters cannot be served as given."""

    exit_code = 2


class CheckpointError(DdtreeError):
    """A file of a model directory is missing, truncated, or not what its config says."""


class BundleError(DdtreeError):
    """A plan or bundle file is missing, changed, or of another format."""


class DeviceError(DdtreeError):
    """The machine lacks what the plan needs."""
