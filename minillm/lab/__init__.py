"""What the course needs around the engine: measuring, drawing, checking. The engine imports nothing from here."""
