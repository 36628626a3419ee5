"""Many runs as one table."""
