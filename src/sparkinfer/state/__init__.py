"""What a target remembers of a sequence, and how it is taken back."""

from sparkinfer.state.sequence import Sequence, Snapshot, StateShape

__all__ = ["Sequence", "Snapshot", "StateShape"]
