"""A router that sends each prompt to the engine whose node holds the most of it."""
