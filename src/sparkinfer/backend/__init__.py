"""Where buffers live and how a recorded sequence of ops is replayed."""
