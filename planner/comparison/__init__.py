"""What a plan changes, shown on the user's own texts: ``plan compare``."""
