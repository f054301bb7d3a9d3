"""What is seen: drawings and the report."""
