"""Output that keeps to a rule: compiled with llguidance, followed token by token."""
