"""What shows and keeps the course of a run: in notebooks, in pages and in the tools of others."""
