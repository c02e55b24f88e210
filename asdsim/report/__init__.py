"""What a walk did to the text: strips of tokens for a terminal, and one page that holds everything."""
