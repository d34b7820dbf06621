"""What runs on a GPU machine only: `scripts/gpu`."""
