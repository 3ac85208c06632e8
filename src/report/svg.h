#pragma once

#include <string>
#include <string_view>

namespace lockstep {

/// How wide and high a drawing is, and in which layouts of the page it is shown. Text is not scaled with the page, so
/// each drawing is made once for each layout.
struct DrawingSize {
  const char* layout;  ///< class: "wide", "middle" or "narrow"
  double width;
  double height;
};

/// One drawing in the making. Colours and fonts are those of the page's style, by class.
class Svg {
 public:
  /// `label` is what a screen reader says; `attributes` stand in the tag as they are.
  Svg(const DrawingSize& size, std::string_view label, std::string_view attributes = "");

  void line(std::string_view css, double x1, double y1, double x2, double y2);
  void rect(std::string_view css, double x, double y, double width, double height, std::string_view tooltip = "");
  void circle(std::string_view css, double x, double y, double radius);
  /// `anchor`: start, middle or end.
  void text(std::string_view css, double x, double y, std::string_view anchor, std::string_view content);
  /// As it is.
  void raw(std::string_view markup) { out_ += markup; }

  std::string finish() { return std::move(out_) + "</svg>"; }

 private:
  std::string out_;
};

/// How wide a text is at the page's small size, at most; a font that is narrower leaves room.
double text_width(std::string_view text);
/// The text, or its beginning and an ellipsis, in at most `width`.
std::string fitted(std::string_view text, double width);

}  // namespace lockstep
