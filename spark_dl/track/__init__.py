"""What people look at: reports of runs."""
