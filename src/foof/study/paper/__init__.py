"""What the paper says: its figures as searches, its published curves, its claims, and the rules that decide them."""
