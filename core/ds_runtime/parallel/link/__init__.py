"""How ranks meet, and what they tell each other beside their collectives."""
