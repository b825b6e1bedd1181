"""Groups of ranks: what a platform's communicator is asked, in a process for each."""
