"""From a source's files to a federation: sources → compose → splits → partition → Federation."""
