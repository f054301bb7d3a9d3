"""One run: its setting, model and method, what is measured on the way, and the record it gives."""
