"""What people look at: tables, figures and pages, and nothing that trains."""
