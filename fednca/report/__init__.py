"""What people look at: tables, and nothing that trains."""
