"""Hand-made answers and the number that each is, by hand; None where it is no single number.

A text without a mark is tried behind `####`, in `\\boxed{...}`, and after "The answer is".
"""
# ruff: noqa: E501
ANSWERS = [
    # sign
    ("18", 18), ("+18", 18), ("-18", -18), ("- 18", -18), ("−18", -18), ("–18", -18), ("(-5)", -5), ("(18)", 18), ("negative 5", -5),
    ("minus 5", -5), ("positive 18", 18), ("-$5", -5), ("$-5", -5), ("-(5)", -5), ("Negative 12", -12), ("negative five", -5), ("--5", None),
    ("+-5", None), ("±5", None), ("- -5", None), ("-0", 0), ("negative 2.5", "-5/2"), ("minus two million", -2000000), ("(+18)", 18),
    # scale
    ("2 million", 2000000), ("2 thousand", 2000), ("$2 million", 2000000), ("1.5 billion", 1500000000), ("2.5 million dollars", 2500000),
    ("3 hundred", 300), ("$2k", 2000), ("2K", 2000), ("$3M", 3000000), ("4B", 4000000000), ("2 hundred thousand", 200000),
    ("two million", 2000000), ("half a million", 500000), ("a million", 1000000), ("1 trillion", 10**12), ("2 dozen", 24), ("two dozen", 24),
    ("a dozen", 12), ("half a dozen", 6), ("3 dozen eggs", 36), ("one hundred dozen", 1200), ("12 thousands", 12000), ("2 and a half million", 2500000),
    ("1.8e1", 18), ("2e3", 2000), ("1.5E+2", 150), ("1.8 * 10^1", 18), ("3 × 10^4", 30000), (r"3 \times 10^{4}", 30000), ("1e999999999", None),
    # LaTeX
    (r"2\,000 + 3\,000 = 5\,000", 5000), (r"\frac{\frac{36}{2}}{1}", 18), ("2^{3 + 1} + 2", 18), (r"90 \div 5", 18), (r"5\% of 360", 18),
    (r"\$5 + \$13", 18), (r"\approx 18", 18), (r"\leq 18", None), (r"\ge 18", None), (r"\pm 18", None),
    # fractions
    ("1/2", "1/2"), ("36/2", 18), ("1 1/2", "3/2"), ("18 1/2", "37/2"), ("½", "1/2"), ("2½", "5/2"), ("¾", "3/4"), ("half", "1/2"),
    ("one half", "1/2"), ("a third", "1/3"), ("two thirds", "2/3"), ("three quarters", "3/4"), ("one and a half", "3/2"), ("18 and a half", "37/2"),
    ("half of 36", 18), ("a third of 54", 18), ("-1/2", "-1/2"), (r"\frac{36}{2}", 18), (r"\dfrac{1}{2}", "1/2"), (r"\frac12", "1/2"),
    (r"1\frac{1}{2}", "3/2"), (r"-\frac{1}{2}", "-1/2"), (r"-1\frac{1}{2}", "-3/2"), ("1/0", None), ("18.5", "37/2"), (".5", "1/2"), ("0.5", "1/2"),
    ("18.0", 18), ("18.00", 18), ("3/4 of 24", 18), ("an eighth", "1/8"), ("3 quarters", 3),
    # powers and roots
    ("5 squared", 25), ("2 cubed", 8), ("2^3", 8), ("2**3", 8), ("5²", 25), ("2³", 8), ("10^{3}", 1000), ("2 to the power of 3", 8),
    ("10 to the 3rd power", 1000), ("-2^2", -4), ("(-2)^2", 4), ("2^{-1}", "1/2"), (r"\sqrt{324}", 18), ("√324", 18), (r"\sqrt{2}", None),
    ("9^9^9^9", None), (r"9^{9^{9^9}}", None), ("five squared", 25), ("10⁴", 10000), ("0^0", 1), ("4^(1/2)", 2),
    # percent
    ("20%", 20), (r"20\%", 20), ("20 %", 20), ("20 percent", 20), ("12.5%", "25/2"), ("10% of 180", 18), ("50 percent of 36", 18), ("-5%", -5),
    ("% 18", 18), ("18 per cent", 18),
    # currency
    ("$18", 18), (r"\$18", 18), ("$18.00", 18), ("$ 18", 18), ("18$", 18), ("€18", 18), ("18 €", 18), ("£1,800", 1800), ("18 dollars", 18),
    ("US$18", 18), ("USD 18", 18), ("18 USD", 18), ("$1,234.50", "2469/2"), ("18 dollars and 50 cents", "37/2"), ("$18 and 50 cents", "37/2"),
    ("50 cents", 50), ("50c", 50), ("¢50", 50), ("$18 or $17", None), ("Rs. 18", 18),
    # separators
    ("1,234", 1234), ("1,234,567", 1234567), ("1 234", 1234), ("1\u00a0234", 1234), ("1\u202f234 apples", 1234), ("1'234", 1234), ("1_234", 1234),
    (r"1{,}234", 1234), (r"1\,234", 1234), ("12,34", None), ("1,2341", None), ("1,234.5.6", None), ("1.2.3", None), ("1,00,000", 100000),
    ("18,17", None), ("17, 18", None), ("1.234,56", None), ("１８", 18), ("٣", None), ("1,234.", 1234), ("2,000 thousand", 2000000),
    # words
    ("eighteen", 18), ("Eighteen apples", 18), ("twenty-one", 21), ("one hundred and twenty-three", 123), ("forty-two thousand", 42000), ("zero", 0),
    ("one thousand two hundred and five", 1205), ("eighteen (18)", 18), ("18 (eighteen)", 18), ("two hundred", 200), ("ninety nine", 99),
    ("three five", None), ("none", None), ("nothing", None), ("a lot", None), ("", None), ("unknown", None), ("NaN", None), ("infinity", None),
    ("∞", None), (r"\infty", None), ("eighteen or seventeen", None),
    # units
    ("18 apples", 18), (r"\text{18 apples}", 18), (r"18\text{ apples}", 18), (r"18 \text{ m}^2", 18), (r"\mathrm{18}", 18), ("18 m^2", 18), ("18 m²", 18),
    ("18 cm³", 18), ("18 square feet", 18), ("18 km/h", 18), ("18 m/s", 18), ("18 miles per hour", 18), ("18kg", 18), ("18m", 18), ("18 m", 18),
    ("18°", 18), ("18°C", 18), (r"18^\circ", 18), ("$18/hour", 18), ("$18 per hour", 18), ("18 (apples)", 18), ("18th", 18), ("18 hours", 18),
    ("18 red apples", 18), ("18 apples.", 18), ("18!", 18), ("18 cups of flour", 18), ("18 ft^2", 18), ("18 m2", 18),
    # names and whole calculations
    ("x = 18", 18), (r"x = 18", 18), ("=18", 18), ("Total: 18", 18), ("9 * 2 = 18", 18), ("9*2=18", 18), (r"9 \cdot 2", 18), ("9 x 2 = 18", 18),
    ("16 + 2", 18), ("20 - 2 = 18 eggs", 18), ("9 * 2 = 17", None), ("9 dollars * 2 = 18 dollars", 18), ("36 / 2 = 18", 18), ("18 = 17", None),
    ("18 = 18", 18), ("Janet makes 18 dollars", 18), ("so 18", 18), ("**18**", 18), ("*18*", 18), ("`18`", 18), ("<b>18</b>", 18), ("_18_", 18),
    ("36 divided by 2", 18), ("9 times 2", 18), ("(9 + 9)", 18), ("2 * (4 + 5)", 18), ("(16 - 7) * 2 = 18", 18), ("16 plus 2", 18), ("53/3 ≈ 18", 18),
    ("about 18", 18), ("approximately 18", 18), ("≈ 18", 18), ("$18$", 18), (r"\(18\)", 18), ("18 (9 * 2)", 18), ("9(2) = 18", 18), ("9(2)", 18), ("2(4 + 5)", 18), ("18 to the man", 18), ("9 * 2 = $<<9*2=18>>18", 18), ("<<9*2=18>>18 eggs", 18),
    # no single number
    ("17, not 18", 17), ("18 (not 17)", 18), ("not 17 but 18", 18), ("not 18", None), ("18 rather than 17", 18), ("18 instead of 17", 18), ("18 or 17", None),
    ("18 and 17", None), ("18 19", None), ("between 17 and 19", None), ("17 to 19", None), ("at least 18", None), ("at most 18", None),
    ("more than 18", None), ("less than 18", None), ("over 18", None), ("up to 18", None), ("18 or more", None), ("18 or so", None), ("18+", None),
    ("> 18", None), ("<18", None), (r"\geq 18", None), ("≤ 18", None), ("18:00", None), ("3:1", None), ("18 hours 30 minutes", None),
    ("18 out of 20", None), ("2x", None), ("18x", None), ("x18", None), ("18y + 2", None), (r"18\pi", None), ("18π", None), ("18a", None), ("18abc9", None), ("18abc3d", None),
    ("17-19 apples", -2), ("2 3/0", None), ("(((18", 18), ("18)", 18), ("18 apples and 3 pears", None), ("1{8}", None), ("x^2 = 18", None),
]
