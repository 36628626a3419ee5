"""Tables, figures and pages about runs; nothing here trains."""
