"""What is kept in files, and how it is read again."""
