"""What was measured of devices: times of ops and collectives, and what follows from them."""
