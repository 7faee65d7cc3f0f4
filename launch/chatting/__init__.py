"""What `launch.chat` is made of."""
