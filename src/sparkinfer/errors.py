"""Every error a user, a file or a request can cause. The command line prints one line and exits with `exit_code`."""


class SparkError(Exception):
    """Base of all expected errors; the message is one line that names the value and what is accepted."""

    exit_code = 1


class OptionError(SparkError):
    """A command-line option, an environment variable or an argument has a bad value."""

    exit_code = 2


class RequestError(SparkError):
    """A generation request cannot be served as asked (context, limits, sampling values)."""

    exit_code = 2


class GGUFError(SparkError):
    """A model file is malformed, truncated or contradicts itself."""

    exit_code = 65


class UnsupportedError(SparkError):
    """A file is well formed but uses a feature this build does not have."""

    exit_code = 65


class ShapeError(SparkError):
    """Tensors or model parameters do not fit each other."""

    exit_code = 65


class ModelOutputError(SparkError):
    """The model produced a logit that is not a number."""

    exit_code = 65


class MissingFileError(SparkError):
    """A named file does not exist or is not a regular file."""

    exit_code = 66


class DeviceError(SparkError):
    """A device, a folder or a remote endpoint is not available."""

    exit_code = 69


class MemoryLimitError(SparkError):
    """The model, its state or a request does not fit into memory."""

    exit_code = 71
