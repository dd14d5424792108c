"""How ranks find each other, who lives, and how they come to one answer."""
