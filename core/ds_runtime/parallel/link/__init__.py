"""How ranks meet, and what they tell each other besides their collectives."""
