"""Ways to move frames between workers. They know nothing of what the frames mean."""
