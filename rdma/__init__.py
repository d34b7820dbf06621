"""Moving bytes: memory regions and the shm and tcp transports."""
