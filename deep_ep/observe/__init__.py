"""What is counted and stamped while operations run, and who looks at it."""
