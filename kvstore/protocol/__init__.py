"""The session protocol: frames, messages and the caller state machine, all without I/O."""
