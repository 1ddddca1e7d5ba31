"""The errors that hf_zero raises: each says what is wrong, where, and what to do."""


class ZeroError(Exception):
    """Base of every error raised by hf_zero."""


class ConfigError(ZeroError, ValueError):
    """A configuration has an unknown key or a wrong value, or asks for things that cannot be combined."""


class PartitionError(ZeroError, RuntimeError):
    """A model or a parameter cannot be partitioned, or was changed behind the engine's back."""


class CollectiveError(ZeroError, RuntimeError):
    """An exchange between ranks failed: a peer is gone, is late, or did something else."""


class UsageError(ZeroError, RuntimeError):
    """A call that cannot work in this place, in this order, or with these arguments."""


class CheckpointError(ZeroError, RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not match what it is to be loaded into."""


class OffloadError(ZeroError, RuntimeError):
    """Host memory or a disk cannot hold, read or write what is offloaded to it, or a step cannot be taken from it."""
