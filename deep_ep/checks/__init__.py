"""What is refused before anything is sent."""
